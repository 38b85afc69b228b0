"""Training on preferences between answers: DPO, ORPO, reward models."""
