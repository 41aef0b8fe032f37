"""Keeps the shorter of the right responses: a component that lives outside of lightning_dataflex."""
