"""Rules that decide before the gate, such as never to retrieve for small talk."""
