"""The formats that archives hold."""
