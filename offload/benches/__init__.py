"""What `python -m offload.bench` runs, one module per benchmark."""
