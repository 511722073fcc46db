"""Who trains it: workers that collect, a learner, a server that may act for the workers, and memory between them."""
