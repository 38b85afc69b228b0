"""Methods of training: what a step makes of forward passes, backward passes and updates."""
