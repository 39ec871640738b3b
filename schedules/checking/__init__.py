"""Proofs about a schedule and its lowered form."""
