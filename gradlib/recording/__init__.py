"""What was recorded, and the questions one can ask of it."""
