"""What the default model is called; read without torch."""

MODEL_NAME = "SmolLM2-135M-Instruct"
FOLDER_NAME = f"{MODEL_NAME}-float32"
