"""Training with forward passes alone: MeZO and variants, replay from the log."""
