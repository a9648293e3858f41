"""How collectives compute: from the peers' memory (`direct`), or by messages (`by_messages`)."""
