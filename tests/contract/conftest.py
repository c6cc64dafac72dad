"""The fixtures of the transport suite, for all of its files."""

from contract.transport_fixtures import (  # noqa: F401
    big_peer,
    checked_peer,
    devices,
    fetcher,
    gpus,
    in_use,
    make,
    memfd,
    mortal_peer,
    new_peer,
    other_peer,
    over_grpc,
    peer,
    shared_checked_peer,
    shared_peer,
    start_reader,
    stream,
    transport,
)
