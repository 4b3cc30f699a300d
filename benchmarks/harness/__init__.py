"""What measures, checks and shows the cases that the ops' files yield."""
