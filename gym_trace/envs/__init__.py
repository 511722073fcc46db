"""All that needs gymnasium to know or to make an environment."""
