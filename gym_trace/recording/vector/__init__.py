"""Recording a vector environment, which steps all lanes together."""
