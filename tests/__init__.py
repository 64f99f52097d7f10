"""The tests mirror the package; a folder beside that mirror tests one way of looking at the whole."""
