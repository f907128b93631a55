"""Safe readers of the model formats that users have."""
