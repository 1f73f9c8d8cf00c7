"""The pure core: states, loops and the functions over them."""
