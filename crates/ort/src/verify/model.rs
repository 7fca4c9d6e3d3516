//! The writer of the small model, and of another one with its weights in a file: protobuf, by the
//! fields of onnx.proto3.

use super::WIDTH;

/// Opset 17 and the IR of its release.
const OPSET: u64 = 17;
const IR: u64 = 8;
/// `TensorProto.FLOAT`.
const FLOAT: u64 = 1;

/// Returns a small model.
pub(crate) fn encoded() -> Vec<u8> {
    with_weights(weight)
}

/// Returns `out = in x a x b x a + c`, for any number of rows. Each product needs a block, as long
/// as no pattern joins them.
fn with_weights(weight: impl Fn(&str, &[usize]) -> Vec<u8>) -> Vec<u8> {
    let nodes = [
        node("MatMul", &["in", "a"], "first"),
        node("MatMul", &["first", "b"], "second"),
        node("MatMul", &["second", "a"], "third"),
        node("Add", &["third", "c"], "out"),
    ];
    let weights =
        [weight("a", &[WIDTH, WIDTH]), weight("b", &[WIDTH, WIDTH]), weight("c", &[WIDTH])];
    let graph = nodes.iter().fold(ProtoMessage::default(), |graph, node| graph.bytes(1, node));
    let graph = graph.bytes(2, b"check");
    let graph = weights.iter().fold(graph, |graph, weight| graph.bytes(5, weight));
    let graph = graph.bytes(11, &value("in")).bytes(12, &value("out"));
    let opset = ProtoMessage::default().number(2, OPSET);
    ProtoMessage::default().number(1, IR).bytes(7, &graph.0).bytes(8, &opset.0).0
}

/// `NodeProto`.
fn node(operator: &str, inputs: &[&str], output: &str) -> Vec<u8> {
    let inputs = inputs.iter().map(|input| input.as_bytes());
    let node = inputs.fold(ProtoMessage::default(), |node, input| node.bytes(1, input));
    node.bytes(2, output.as_bytes()).bytes(4, operator.as_bytes()).0
}

/// `TensorProto` of floats, without its values.
fn tensor(name: &str, shape: &[usize]) -> ProtoMessage {
    let tensor = shape.iter().fold(ProtoMessage::default(), |it, &len| it.number(1, len as u64));
    tensor.number(2, FLOAT).bytes(8, name.as_bytes())
}

/// `TensorProto` of ones.
fn weight(name: &str, shape: &[usize]) -> Vec<u8> {
    tensor(name, shape).bytes(9, &1.0_f32.to_le_bytes().repeat(shape.iter().product())).0
}

/// `ValueInfoProto` of rows of floats.
fn value(name: &str) -> Vec<u8> {
    let rows = ProtoMessage::default().bytes(2, b"rows");
    let columns = ProtoMessage::default().number(1, WIDTH as u64);
    let shape = ProtoMessage::default().bytes(1, &rows.0).bytes(1, &columns.0);
    let tensor = ProtoMessage::default().number(1, FLOAT).bytes(2, &shape.0);
    let kind = ProtoMessage::default().bytes(1, &tensor.0);
    ProtoMessage::default().bytes(1, name.as_bytes()).bytes(2, &kind.0).0
}

/// A protobuf message under construction.
#[derive(Default)]
struct ProtoMessage(Vec<u8>);

impl ProtoMessage {
    /// Adds a field of wire type 0.
    fn number(self, field: u64, value: u64) -> Self {
        self.varint(field << 3).varint(value)
    }

    /// Adds a field of wire type 2: a text, bytes or a message.
    fn bytes(self, field: u64, value: &[u8]) -> Self {
        let mut message = self.varint(field << 3 | 2).varint(value.len() as u64);
        message.0.extend_from_slice(value);
        message
    }

    fn varint(mut self, mut value: u64) -> Self {
        while value >= 0x80 {
            self.0.push(value.to_le_bytes()[0] | 0x80);
            value >>= 7;
        }
        self.0.push(value.to_le_bytes()[0]);
        self
    }
}

/// Returns the same model with its weights in this file, and the contents of the file.
pub(crate) fn external(file: &str) -> (Vec<u8>, Vec<u8>) {
    let data = std::cell::RefCell::new(Vec::new());
    let model = with_weights(|name, shape| {
        let bytes = 1.0_f32.to_le_bytes().repeat(shape.iter().product());
        let (offset, length) = (data.borrow().len().to_string(), bytes.len().to_string());
        let mut tensor = tensor(name, shape);
        for (key, value) in [("location", file), ("offset", &offset), ("length", &length)] {
            let entry = ProtoMessage::default().bytes(1, key.as_bytes());
            tensor = tensor.bytes(13, &entry.bytes(2, value.as_bytes()).0);
        }
        data.borrow_mut().extend_from_slice(&bytes);
        tensor.number(14, 1).0 // `EXTERNAL`
    });
    (model, data.into_inner())
}

mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_in_groups_of_seven_bits() {
        let message = ProtoMessage::default().number(1, 300).bytes(2, b"ab");
        assert_eq!(message.0, [0x08, 0xac, 0x02, 0x12, 2, b'a', b'b']);
    }

    /// To change the model, write `encoded()` to that file.
    #[test]
    fn the_model_is_what_is_written_here() {
        assert_eq!(crate::verify::MODEL, encoded());
    }
}
