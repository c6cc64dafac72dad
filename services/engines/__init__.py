"""Training engines, which share the interface `services.engines.base.TrainEngine`."""
