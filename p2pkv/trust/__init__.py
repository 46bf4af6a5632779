"""Who may speak: the consumer's rules over verified manifests."""
