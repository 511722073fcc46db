"""From steps to the files of a trace: what both recording wrappers share, with a package for each of them."""
