"""What a run will hold and how long a step will take, told before anything is allocated."""
