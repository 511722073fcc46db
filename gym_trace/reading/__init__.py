"""From the files of a trace to its episodes and their arrays. Knows nothing of gymnasium."""
