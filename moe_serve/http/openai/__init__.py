"""The routes and answers of OpenAI's API."""
