"""One plug-in of each kind for rlhf-cluster, to copy from."""
