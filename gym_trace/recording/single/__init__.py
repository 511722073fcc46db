"""Recording a single environment."""
