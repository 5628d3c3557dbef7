"""Trainers of others that generate here."""
