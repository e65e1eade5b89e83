"""The routes and answers of OpenAI's API, and the routes for tokens and rendered prompts."""
