"""Pictures to files: MP4, GIF, PNG, asciicasts, what is drawn over frames, and which episodes are filmed."""
