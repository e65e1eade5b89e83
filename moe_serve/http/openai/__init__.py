"""The routes and answers of OpenAI's API, and the routes of other servers for tokens and prompts."""
