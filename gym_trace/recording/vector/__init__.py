"""Recording a vector environment, whose steps come for all lanes at a time."""
