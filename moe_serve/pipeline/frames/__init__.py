"""The bytes of rows and sums on their way between ranks: headers, sizes and memory."""
