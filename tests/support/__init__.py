"""Tools that the tests run, too large for a module beside them."""
