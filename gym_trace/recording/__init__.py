"""Recording: the shared parts of both recording wrappers, and a package for each."""
