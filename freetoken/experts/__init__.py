"""Expert records, the store, slots and the actors that own them."""
