"""Turns texts and chats into tokens, and tokens into text."""
