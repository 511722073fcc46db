"""Files that hold what several writers have recorded, read as if each of these had files of its own."""
