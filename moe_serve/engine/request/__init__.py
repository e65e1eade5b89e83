"""The request, its sequences and parameters, and the figures about them."""
