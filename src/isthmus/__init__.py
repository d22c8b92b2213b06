"""isthmus trains one PyTorch model across machines joined by slow, mixed or failing networks."""
