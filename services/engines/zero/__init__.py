"""The training engine `zero`, on DeepSpeed's ZeRO optimizers."""
