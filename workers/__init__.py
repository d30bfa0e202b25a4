"""The data plane: problems, sampler, learner, verifier and the GRPO mathematics."""
