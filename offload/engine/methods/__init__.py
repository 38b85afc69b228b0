"""Training methods: the forwards, backwards and updates in a step."""
