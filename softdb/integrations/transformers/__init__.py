"""A language model with a memory: the kNN-LM over a database, for causal models of Hugging Face transformers.

    p(y | context) = λ p_memory(y | context) + (1 - λ) p_model(y | context)
    p_memory(y | context) = Σ_{i: y_i = y} exp(-‖h - k_i‖² / T) / Σ_i exp(-‖h - k_i‖² / T)

Khandelwal et al. 2020, equations 2 and 3. h is the hidden state that enters the model's output head; k_i are the hidden
states at the places of a corpus, y_i the tokens that followed them. The paper sums over the k nearest. Here the sum may
also be over every record, exactly or to a tolerance, and λ and T are learned through the database.
"""

from softdb.integrations.transformers.language_model import KNNLanguageModel, Mixture

__all__ = ["KNNLanguageModel", "Mixture"]
