"""The covered operators, a module for each family."""
