"""Who answers: environments, episodes, sandboxes and tools."""
