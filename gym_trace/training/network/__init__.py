"""Network, update, and the forms of observations and actions."""
