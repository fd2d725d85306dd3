"""Workers and servers of parameters in torch."""
