"""Training one model with several processes, sampling from it on other servers, and simulating runs on many GPUs."""
