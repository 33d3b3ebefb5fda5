"""Recipes: importable scripts that wire the parts together and decide nothing."""
