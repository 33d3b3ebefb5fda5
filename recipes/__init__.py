"""Recipes: importable scripts that combine the components of the library."""
