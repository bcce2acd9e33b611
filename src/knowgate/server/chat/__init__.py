"""How a chat is answered: reading the request, deciding, and the model in this process."""
