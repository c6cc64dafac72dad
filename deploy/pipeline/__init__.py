"""The three steps of RLHF from raw data: supervised fine-tuning, a reward model, PPO. Everything runs on two cores."""
