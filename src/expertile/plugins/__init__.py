"""The only files that import the programs that host us. Nothing in expertile imports them."""
