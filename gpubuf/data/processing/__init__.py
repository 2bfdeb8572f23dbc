"""Processing of batches on their way out, in the launch that copies the rows."""
