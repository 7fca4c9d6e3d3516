//! Values that the source states: constants, defaults, and the results of short functions.
//!
//! The crate is not built for this. A constant is found by its name, wherever its file lies, and
//! its expression is worked out here: numbers, sizes, times, tables, and a `match` over a variant.
//! Anything else is a fault that names the place, never a value.
//!
//! Invariant: a value comes from exactly one place in the source.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{
    Attribute, BinOp, Block, Expr, ExprCall, ExprMatch, ExprMethodCall, ExprPath, ExprStruct,
    Fields, ImplItemConst, ImplItemFn, ItemConst, ItemEnum, ItemFn, ItemImpl, ItemMod, Lit, Member,
    Meta, Pat, PatTupleStruct, Stmt, Type,
};

use crate::tree::{Faults, Source, Tree};

/// The result of an expression.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Number(f64),
    Bytes(u64),
    Time(Duration),
    Text(String),
    Flag(bool),
    /// `None`, or a decay time of `Never`.
    Nothing,
    List(Vec<Self>),
    Fields(BTreeMap<String, Self>),
    /// A type and its variant.
    Variant(String, String),
    /// A part that is not worked out, with the reason.
    Unknown(String),
}

/// A constant, function or enumeration with its place.
#[derive(Clone)]
struct Item {
    file: String,
    line: usize,
    /// The parts of the path, the modules inside the file, and the type of the `impl`.
    context: Vec<String>,
    owner: Option<String>,
    name: String,
    kind: Kind,
}

#[derive(Clone)]
enum Kind {
    Constant(Expr),
    Function(Block),
    /// The variant with `#[default]`.
    Default(String),
}

/// The locals of a function, and the type that `Self` stands for.
#[derive(Clone, Debug, Default)]
struct Scope {
    file: String,
    owner: Option<String>,
    locals: BTreeMap<String, Value>,
}

/// A value with its place; asking for another kind of value is a fault.
#[derive(Clone, Debug)]
pub(crate) struct Found<'a> {
    faults: &'a Faults,
    place: String,
    pub(crate) value: Value,
}

/// The source as a place to look values up.
pub(crate) struct Code<'a> {
    tree: &'a Tree,
    pub(crate) faults: &'a Faults,
    /// The files that define a constant, function or enumeration of each name.
    files: BTreeMap<&'a str, Vec<&'a Source>>,
    items: RefCell<BTreeMap<String, Rc<Vec<Item>>>>,
}

impl<'a> Code<'a> {
    pub(crate) fn new(tree: &'a Tree, faults: &'a Faults) -> Self {
        let mut files: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for source in tree.files.iter().filter(|source| is_searched(&source.name)) {
            for name in defined(&source.text) {
                let of_name = files.entry(name).or_default();
                if of_name.last().is_none_or(|last: &&Source| last.name != source.name) {
                    of_name.push(source);
                }
            }
        }
        Self { tree, faults, files, items: RefCell::default() }
    }

    /// Returns the constant of this path: its name, after parts of its module's path or its type
    /// if the name alone is not unique.
    pub(crate) fn constant(&self, path: &str) -> Found<'a> {
        let item = self.item(path, |item| matches!(item.kind, Kind::Constant(_)));
        self.found(path, item, &Scope::default())
    }

    /// Returns what a method of an enumeration returns for one of its variants.
    pub(crate) fn of(&self, owner: &str, variant: &str, method: &str) -> Found<'a> {
        let path = format!("{owner}::{method}");
        let item = self.item(&path, |item| {
            matches!(item.kind, Kind::Function(_)) && item.owner.as_deref() == Some(owner)
        });
        let this = Value::Variant(owner.to_owned(), variant.to_owned());
        let locals = BTreeMap::from([("self".to_owned(), this)]);
        self.found(&path, item, &Scope { locals, ..Scope::default() })
    }

    /// Returns the value of a setting that neither the program nor the environment sets.
    pub(crate) fn setting(&self, profile: &str, name: &str) -> Found<'a> {
        // The settings of device arenas are a group of their own.
        let (owner, name) = match name.strip_prefix("device") {
            Some("") => ("DeviceConfig", "choice"),
            Some(of_device) => ("DeviceConfig", of_device.trim_start_matches('_')),
            None => ("Config", name),
        };
        let what = format!("{owner}::{name}");
        let resolve = format!("{owner}::resolve");
        let item = self.item(&resolve, |item| matches!(item.kind, Kind::Function(_)));
        let place = item.as_ref().map_or_else(|_| what.clone(), |item| place_of(item, &what));
        let value = item.and_then(|item| {
            let Kind::Function(block) = &item.kind else { return Err("no function".to_owned()) };
            let profile = Value::Variant("Profile".to_owned(), profile.to_owned());
            let locals = BTreeMap::from([("base".to_owned(), profile)]);
            let mut scope = Scope { file: item.file.clone(), owner: item.owner.clone(), locals };
            for stmt in &block.stmts {
                let Stmt::Local(local) = stmt else { continue };
                let (Pat::Ident(name), Some(init)) = (&local.pat, &local.init) else { continue };
                let name = name.ident.to_string();
                if !scope.locals.contains_key(&name) {
                    let value = self.lazy(&init.expr, &scope);
                    scope.locals.insert(name, value);
                }
            }
            let made = struct_of(block).ok_or("it makes no struct")?;
            let value = expr_of(made, name).ok_or("no such field")?;
            self.expr(value, &scope)
        });
        self.settle(place, value)
    }

    /// Returns the name of a variant in configuration: of its method `name`, or as it is displayed.
    pub(crate) fn name_of(&self, value: &Value) -> String {
        let Value::Variant(owner, variant) = value else {
            self.faults.say(format!("{value:?}: expected a variant"));
            return String::new();
        };
        let has_name = self.item(&format!("{owner}::name"), |item| item.owner.is_some()).is_ok();
        self.of(owner, variant, if has_name { "name" } else { "fmt" }).text()
    }

    /// Returns the text between two marks of a file.
    pub(crate) fn within(&self, file: &str, mark: &str, end: &str) -> String {
        let parts: Vec<_> = self.tree.text(file, self.faults).split(mark).collect();
        let [_, after] = parts.as_slice() else {
            let count = parts.len() - 1;
            self.faults.say(format!("{file}: {mark:?} is there {count} times: expected 1"));
            return String::new();
        };
        after.split(end).next().unwrap_or_default().to_owned()
    }

    fn settle(&self, place: String, value: Result<Value, String>) -> Found<'a> {
        let value = value.unwrap_or_else(|why| {
            self.faults.say(format!("{place}: {why}"));
            Value::Unknown(why)
        });
        Found { faults: self.faults, place, value }
    }

    fn found(&self, what: &str, item: Result<Item, String>, scope: &Scope) -> Found<'a> {
        match item {
            Ok(item) => self.settle(place_of(&item, what), self.item_value(&item, scope)),
            Err(why) => self.settle(what.to_owned(), Err(why)),
        }
    }

    fn item_value(&self, item: &Item, scope: &Scope) -> Result<Value, String> {
        let scope = Scope {
            file: item.file.clone(),
            owner: item.owner.clone(),
            locals: scope.locals.clone(),
        };
        match &item.kind {
            Kind::Constant(expr) => self.expr(expr, &scope),
            Kind::Function(block) => self.block(block, scope),
            Kind::Default(variant) => Ok(Value::Variant(item.name.clone(), variant.clone())),
        }
    }

    fn item(&self, path: &str, fits: impl Fn(&Item) -> bool) -> Result<Item, String> {
        let name = path.rsplit("::").next().unwrap_or(path);
        self.item_in(path, name, fits)
    }

    /// The one item of this path, in a file that contains the mark.
    fn item_in(
        &self,
        path: &str,
        mark: &str,
        fits: impl Fn(&Item) -> bool,
    ) -> Result<Item, String> {
        let (name, context) = path.rsplit_once("::").map_or((path, ""), |(a, b)| (b, a));
        let is_in = |item: &Item| {
            context.split("::").filter(|part| !part.is_empty()).all(|part| {
                item.context.iter().any(|known| known == part)
                    || item.owner.as_deref() == Some(part)
            })
        };
        let mut found = Vec::new();
        for source in self.files.get(name).into_iter().flatten() {
            if mark == name || source.text.contains(mark) {
                let items = self.items_of(&source.name, &source.text);
                let here = items.iter().filter(|item| item.name == name && is_in(item));
                found.extend(here.filter(|item| fits(item)).cloned());
            }
        }
        if found.len() > 1 {
            // The item of the module itself before those of modules inside it.
            let parts: Vec<_> = context.split("::").map(str::to_owned).collect();
            let is_last = |item: &Item| item.context.ends_with(&parts);
            if found.iter().filter(|item| is_last(item)).count() == 1 {
                found.retain(is_last);
            }
        }
        if found.len() == 1 {
            return Ok(found.remove(0));
        }
        let places: Vec<_> = found.iter().map(|item| place_of(item, name)).collect();
        Err(format!("{} of {path} in the sources: expected 1 {places:?}", found.len()))
    }

    fn items_of(&self, name: &str, text: &str) -> Rc<Vec<Item>> {
        if let Some(items) = self.items.borrow().get(name) {
            return Rc::clone(items);
        }
        let mut reader = Reader { file: name, inner: Vec::new(), owner: None, items: Vec::new() };
        if let Ok(file) = syn::parse_file(text) {
            reader.visit_file(&file);
        } else {
            self.faults.say(format!("{name}: cannot be parsed"));
        }
        let items = Rc::new(reader.items);
        self.items.borrow_mut().insert(name.to_owned(), Rc::clone(&items));
        items
    }
}

/// The words after `const`, `fn` and `enum`.
fn defined(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let mut before = "";
    words.filter(|word| !word.is_empty()).filter(move |word| {
        let is_defined = ["const", "fn", "enum"].contains(&before);
        before = word;
        is_defined && *word != "fn"
    })
}

/// Returns `true` for files in which values are looked up: all code but tests.
fn is_searched(name: &str) -> bool {
    let is_code = ["src/", "crates/", "examples/", "benches/"].iter().any(|f| name.starts_with(f));
    let is_test = name.split('/').any(|part| part.starts_with("test") || part == "planted.rs");
    is_code && !is_test && name.ends_with(".rs")
}

fn place_of(item: &Item, what: &str) -> String {
    format!("{}:{}: {what}", item.file, item.line)
}

/// The struct that a function ends with, as it is or in `Ok`.
fn struct_of(block: &Block) -> Option<&ExprStruct> {
    let Some(Stmt::Expr(last, None)) = block.stmts.last() else { return None };
    match last {
        Expr::Struct(made) => Some(made),
        Expr::Call(call) => match call.args.first() {
            Some(Expr::Struct(made)) => Some(made),
            _ => None,
        },
        _ => None,
    }
}

fn expr_of<'e>(made: &'e ExprStruct, name: &str) -> Option<&'e Expr> {
    let is_it = |member: &Member| matches!(member, Member::Named(ident) if ident == name);
    made.fields.iter().find(|field| is_it(&field.member)).map(|field| &field.expr)
}

/// Collects the items of a file.
struct Reader<'f> {
    file: &'f str,
    inner: Vec<String>,
    owner: Option<String>,
    items: Vec<Item>,
}

impl Reader<'_> {
    fn add(&mut self, name: &proc_macro2::Ident, kind: Kind) {
        let path = self.file.trim_end_matches(".rs").split('/').map(str::to_owned);
        self.items.push(Item {
            file: self.file.to_owned(),
            line: name.span().start().line,
            context: path.chain(self.inner.iter().cloned()).collect(),
            owner: self.owner.clone(),
            name: name.to_string(),
            kind,
        });
    }
}

/// Returns `true` if a condition names `test`, other than in `not(...)`.
fn requires_test(condition: TokenStream) -> bool {
    let mut negated = false;
    condition.into_iter().any(|token| match token {
        TokenTree::Ident(name) => {
            negated = name == "not";
            name == "test"
        }
        TokenTree::Group(group) => !std::mem::take(&mut negated) && requires_test(group.stream()),
        _ => false,
    })
}

/// Returns `true` if the item is built for tests alone.
pub(crate) fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::List(list) if list.path.is_ident("cfg") => requires_test(list.tokens.clone()),
        Meta::Path(path) => path.is_ident("test"),
        _ => false,
    })
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        let is_planned = is_test(&item.attrs) || item.ident == "tests";
        if !is_planned {
            self.inner.push(item.ident.to_string());
            visit::visit_item_mod(self, item);
            self.inner.pop();
        }
    }

    fn visit_item_impl(&mut self, item: &'ast ItemImpl) {
        if is_test(&item.attrs) {
            return;
        }
        let owner = match &*item.self_ty {
            Type::Path(path) => path.path.segments.last().map(|last| last.ident.to_string()),
            _ => None,
        };
        let before = std::mem::replace(&mut self.owner, owner);
        visit::visit_item_impl(self, item);
        self.owner = before;
    }

    fn visit_item_const(&mut self, item: &'ast ItemConst) {
        if !is_test(&item.attrs) {
            self.add(&item.ident, Kind::Constant((*item.expr).clone()));
        }
    }

    fn visit_impl_item_const(&mut self, item: &'ast ImplItemConst) {
        self.add(&item.ident, Kind::Constant(item.expr.clone()));
    }

    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        if !is_test(&item.attrs) {
            self.add(&item.sig.ident, Kind::Function((*item.block).clone()));
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast ImplItemFn) {
        if !is_test(&item.attrs) {
            self.add(&item.sig.ident, Kind::Function(item.block.clone()));
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_item_enum(&mut self, item: &'ast ItemEnum) {
        let marked = item.variants.iter().find(|variant| {
            let is_default = |attribute: &Attribute| attribute.path().is_ident("default");
            variant.attrs.iter().any(is_default) && matches!(variant.fields, Fields::Unit)
        });
        if let Some(variant) = marked {
            self.add(&item.ident, Kind::Default(variant.ident.to_string()));
        }
    }
}

/// Working expressions out.
impl Code<'_> {
    fn block(&self, block: &Block, mut scope: Scope) -> Result<Value, String> {
        for stmt in &block.stmts {
            match stmt {
                Stmt::Local(local) => {
                    let init = local.init.as_ref().ok_or("a binding without a value")?;
                    let value = self.lazy(&init.expr, &scope);
                    bind(&local.pat, value, &mut scope)?;
                }
                Stmt::Expr(expr, None) => return self.expr(expr, &scope),
                Stmt::Item(_) | Stmt::Expr(_, Some(_)) | Stmt::Macro(_) => {}
            }
        }
        Err("a block without a value".to_owned())
    }

    /// A part that cannot be worked out is a fault only if it is asked for.
    fn lazy(&self, expr: &Expr, scope: &Scope) -> Value {
        self.expr(expr, scope).unwrap_or_else(Value::Unknown)
    }

    fn expr(&self, expr: &Expr, scope: &Scope) -> Result<Value, String> {
        match expr {
            Expr::Lit(lit) => literal(&lit.lit),
            Expr::Paren(inner) => self.expr(&inner.expr, scope),
            Expr::Group(inner) => self.expr(&inner.expr, scope),
            Expr::Reference(inner) => self.expr(&inner.expr, scope),
            Expr::Cast(inner) => self.expr(&inner.expr, scope),
            Expr::Block(inner) => self.block(&inner.block, scope.clone()),
            Expr::Path(path) => self.path(path, scope),
            Expr::Binary(binary) => {
                let (left, right) =
                    (self.expr(&binary.left, scope)?, self.expr(&binary.right, scope)?);
                operate(&binary.op, &left, &right)
            }
            Expr::Array(array) => {
                Ok(Value::List(array.elems.iter().map(|one| self.lazy(one, scope)).collect()))
            }
            Expr::Tuple(tuple) => {
                Ok(Value::List(tuple.elems.iter().map(|one| self.lazy(one, scope)).collect()))
            }
            Expr::Struct(made) => self.made(made, scope),
            Expr::Match(choice) => self.choice(choice, scope),
            Expr::Call(call) => self.call(call, scope),
            Expr::MethodCall(call) => self.method(call, scope),
            Expr::Field(field) => {
                let base = self.expr(&field.base, scope)?;
                match (&field.member, base) {
                    (Member::Named(name), Value::Fields(fields)) => {
                        fields.get(&name.to_string()).cloned().ok_or(format!("no field {name}"))
                    }
                    (Member::Named(name), value) if name == "value" => Ok(value),
                    (_, value) => Err(format!("a field of {value:?}")),
                }
            }
            _ => Err("an expression of a kind that is not worked out here".to_owned()),
        }
    }

    fn made(&self, made: &ExprStruct, scope: &Scope) -> Result<Value, String> {
        let mut fields = BTreeMap::new();
        for field in &made.fields {
            if let Member::Named(name) = &field.member {
                fields.insert(name.to_string(), self.lazy(&field.expr, scope));
            }
        }
        Ok(Value::Fields(fields))
    }

    fn choice(&self, choice: &ExprMatch, scope: &Scope) -> Result<Value, String> {
        let value = self.expr(&choice.expr, scope)?;
        for arm in &choice.arms {
            if arm.guard.is_none() && fits(&arm.pat, &value, scope)? {
                return self.expr(&arm.body, scope);
            }
        }
        Err(format!("no arm for {value:?}"))
    }

    fn path(&self, path: &ExprPath, scope: &Scope) -> Result<Value, String> {
        let names: Vec<_> = path.path.segments.iter().map(|part| part.ident.to_string()).collect();
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        match names.as_slice() {
            ["None"] | [.., "DecayTime", "Never"] => Ok(Value::Nothing),
            [.., "Duration", "ZERO"] | [.., "DecayTime", "AtOnce"] => {
                Ok(Value::Time(Duration::ZERO))
            }
            [.., "Duration", "MAX"] => Ok(Value::Time(Duration::MAX)),
            [.., "ByteSize", "ZERO"] => Ok(Value::Bytes(0)),
            [.., "ByteSize", "MAX"] => Ok(Value::Bytes(u64::MAX)),
            [name] => match scope.locals.get(*name) {
                Some(value) => Ok(value.clone()),
                None => self.constant_near(name, scope),
            },
            [.., owner, name] => {
                let owner = self_type(owner, scope);
                let is_constant = name.chars().all(|c| !c.is_ascii_lowercase());
                if is_constant {
                    return self.constant_near(&format!("{owner}::{name}"), scope);
                }
                Ok(Value::Variant(owner, (*name).to_owned()))
            }
            [] => Err("an empty path".to_owned()),
        }
    }

    /// A constant of the same file before one of another.
    fn constant_near(&self, path: &str, scope: &Scope) -> Result<Value, String> {
        let is_constant = |item: &Item| matches!(item.kind, Kind::Constant(_));
        let item = self
            .item(path, |item| is_constant(item) && item.file == scope.file)
            .or_else(|_| self.item(path, is_constant))?;
        self.item_value(&item, &Scope::default())
    }

    fn call(&self, call: &ExprCall, scope: &Scope) -> Result<Value, String> {
        let Expr::Path(function) = &*call.func else { return Err("a call of a value".to_owned()) };
        let names: Vec<_> =
            function.path.segments.iter().map(|part| part.ident.to_string()).collect();
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        let argument = |at: usize| {
            let expr = call.args.iter().nth(at).ok_or("too few arguments")?;
            self.expr(expr, scope)
        };
        match names.as_slice() {
            [.., "Some" | "Ok"] | [.., "DecayTime", "Within" | "from_duration"] => argument(0),
            // What neither the environment nor the program sets.
            [.., "pick" | "pick_or"] => argument(2),
            [.., owner, "default"] => self.default_of(&self_type(owner, scope)),
            [.., "Duration" | "DecayTime", unit] => {
                let nanos = match *unit {
                    "from_secs" => 1_000_000_000,
                    "from_millis" => 1_000_000,
                    "from_micros" => 1_000,
                    _ => return Err(format!("Duration::{unit}")),
                };
                let count = whole(&argument(0)?)?;
                Ok(Value::Time(Duration::from_nanos(count * nanos)))
            }
            [.., "ByteSize", unit] => {
                let shift = match *unit {
                    "new" => 0,
                    "kib" => 10,
                    "mib" => 20,
                    "gib" => 30,
                    _ => return Err(format!("ByteSize::{unit}")),
                };
                Ok(Value::Bytes(whole(&argument(0)?)? << shift))
            }
            _ => Err(format!("a call of {}", names.join("::"))),
        }
    }

    fn default_of(&self, owner: &str) -> Result<Value, String> {
        let derived = self.item(owner, |item| matches!(item.kind, Kind::Default(_)));
        let item = derived.or_else(|_| {
            let is_function = |item: &Item| matches!(item.kind, Kind::Function(_));
            self.item(&format!("{owner}::default"), is_function)
        })?;
        self.item_value(&item, &Scope::default())
    }

    fn method(&self, call: &ExprMethodCall, scope: &Scope) -> Result<Value, String> {
        let name = call.method.to_string();
        if matches!(name.as_str(), "write_str" | "pad") {
            return self.expr(call.args.first().ok_or("nothing to write")?, scope);
        }
        let value = self.expr(&call.receiver, scope)?;
        let closure = |at: usize| match call.args.iter().nth(at) {
            Some(Expr::Closure(closure)) => Ok(closure),
            _ => Err(format!("{name} without a closure")),
        };
        let apply = |at: usize, argument: Value| {
            let closure = closure(at)?;
            let mut scope = scope.clone();
            let pattern = closure.inputs.first().ok_or("a closure without an argument")?;
            bind(pattern, argument, &mut scope)?;
            self.expr(&closure.body, &scope)
        };
        match (name.as_str(), value) {
            ("iter" | "into_iter" | "copied" | "cloned" | "get" | "filter", value) => Ok(value),
            ("map", Value::List(all)) => {
                let mapped: Result<_, _> = all.into_iter().map(|one| apply(0, one)).collect();
                Ok(Value::List(mapped?))
            }
            ("find", Value::List(all)) => {
                for one in all {
                    if apply(0, one.clone())? == Value::Flag(true) {
                        return Ok(one);
                    }
                }
                Ok(Value::Nothing)
            }
            ("map_or", Value::Nothing) => self.expr(&call.args[0], scope),
            ("map_or", value) => apply(1, value),
            (_, Value::Variant(owner, variant)) => {
                let method = format!("{owner}::{name}");
                let is_its = |item: &Item| item.owner.as_deref() == Some(&owner);
                let item = self.item(&method, is_its)?;
                let this = Value::Variant(owner.clone(), variant);
                let locals = BTreeMap::from([("self".to_owned(), this)]);
                self.item_value(&item, &Scope { locals, ..Scope::default() })
            }
            (name, value) => Err(format!("{name} of {value:?}")),
        }
    }
}

fn self_type(name: &str, scope: &Scope) -> String {
    let own = scope.owner.as_deref().filter(|_| name == "Self");
    own.unwrap_or(name).to_owned()
}

fn literal(lit: &Lit) -> Result<Value, String> {
    match lit {
        Lit::Int(number) => number
            .base10_digits()
            .parse()
            .map(Value::Number)
            .map_err(|error| format!("{number}: {error}")),
        Lit::Float(number) => number
            .base10_digits()
            .parse()
            .map(Value::Number)
            .map_err(|error| format!("{number}: {error}")),
        Lit::Str(text) => Ok(Value::Text(text.value())),
        Lit::CStr(text) => Ok(Value::Text(text.value().to_string_lossy().into_owned())),
        Lit::Bool(flag) => Ok(Value::Flag(flag.value)),
        _ => Err("a literal of a kind that is not worked out here".to_owned()),
    }
}

/// The value as a whole number.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked before")]
fn whole(value: &Value) -> Result<u64, String> {
    match value {
        Value::Bytes(bytes) => Ok(*bytes),
        Value::Number(count)
            if *count >= 0.0 && count.fract() == 0.0 && *count < 2_f64.powi(53) =>
        {
            Ok(*count as u64)
        }
        value => Err(format!("{value:?} is not a whole number")),
    }
}

fn operate(op: &BinOp, left: &Value, right: &Value) -> Result<Value, String> {
    match (op, left, right) {
        (BinOp::Eq(_), left, right) => Ok(Value::Flag(left == right)),
        (BinOp::Add(_), Value::Number(left), Value::Number(right)) => {
            Ok(Value::Number(left + right))
        }
        (BinOp::Sub(_), Value::Number(left), Value::Number(right)) => {
            Ok(Value::Number(left - right))
        }
        (BinOp::Mul(_), Value::Number(left), Value::Number(right)) => {
            Ok(Value::Number(left * right))
        }
        (BinOp::Div(_), Value::Number(left), Value::Number(right)) => {
            Ok(Value::Number(left / right))
        }
        (BinOp::Shl(_), Value::Number(left), Value::Number(right)) => {
            Ok(Value::Number(left * 2_f64.powf(*right)))
        }
        _ => Err(format!("an operation of {left:?} and {right:?}")),
    }
}

/// Gives the names of a pattern their values.
fn bind(pattern: &Pat, value: Value, scope: &mut Scope) -> Result<(), String> {
    match (pattern, value) {
        (Pat::Ident(ident), value) => {
            scope.locals.insert(ident.ident.to_string(), value);
        }
        (Pat::Reference(inner), value) => bind(&inner.pat, value, scope)?,
        (Pat::Type(inner), value) => bind(&inner.pat, value, scope)?,
        (Pat::Tuple(tuple), Value::List(values)) if tuple.elems.len() == values.len() => {
            for (pattern, value) in tuple.elems.iter().zip(values) {
                bind(pattern, value, scope)?;
            }
        }
        (Pat::Wild(_), _) | (Pat::Tuple(_), Value::Unknown(_)) => {}
        (_, value) => return Err(format!("a pattern for {value:?}")),
    }
    Ok(())
}

/// Returns `true` if a pattern names the variant; its bindings are ignored.
fn fits(pattern: &Pat, value: &Value, scope: &Scope) -> Result<bool, String> {
    match pattern {
        Pat::Wild(_) => Ok(true),
        Pat::Or(or) => {
            for case in &or.cases {
                if fits(case, value, scope)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        Pat::Path(ExprPath { path, .. }) | Pat::TupleStruct(PatTupleStruct { path, .. }) => {
            let names: Vec<_> = path.segments.iter().map(|part| part.ident.to_string()).collect();
            let [.., owner, name] = names.as_slice() else {
                return Err(format!("the pattern {names:?}"));
            };
            Ok(*value == Value::Variant(self_type(owner, scope), name.clone()))
        }
        _ => Err("a pattern of a kind that is not worked out here".to_owned()),
    }
}

impl<'a> Found<'a> {
    fn wrong<T: Default>(&self, expected: &str) -> T {
        // An unknown value is a fault already.
        if !matches!(self.value, Value::Unknown(_)) {
            self.faults.say(format!("{} is {:?}: expected {expected}", self.place, self.value));
        }
        T::default()
    }

    /// Returns the field of a struct.
    pub(crate) fn field(&self, name: &str) -> Self {
        let value = match &self.value {
            Value::Fields(fields) => fields.get(name).cloned(),
            _ => None,
        };
        let value = value.unwrap_or_else(|| {
            self.faults.say(format!("{}: no field {name} in {:?}", self.place, self.value));
            Value::Unknown(name.to_owned())
        });
        self.with(value)
    }

    fn with(&self, value: Value) -> Self {
        Self { faults: self.faults, place: self.place.clone(), value }
    }

    /// Returns the elements of a list.
    pub(crate) fn list(&self) -> Vec<Self> {
        match &self.value {
            Value::List(all) => all.iter().map(|value| self.with(value.clone())).collect(),
            _ => self.wrong::<Vec<()>>("a list").into_iter().map(|()| self.clone()).collect(),
        }
    }

    pub(crate) fn is_nothing(&self) -> bool {
        self.value == Value::Nothing
    }

    pub(crate) fn time(&self) -> Duration {
        if let Value::Time(time) = self.value { time } else { self.wrong("a time") }
    }

    pub(crate) fn number(&self) -> f64 {
        if let Value::Number(number) = self.value { number } else { self.wrong("a number") }
    }

    pub(crate) fn text(&self) -> String {
        if let Value::Text(text) = &self.value { text.clone() } else { self.wrong("a text") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "//! T.
        const LATE: Duration = Duration::from_millis(1_500);
        const STEP: Duration = Duration::from_micros(100 * 100);
        const PART: u64 = 1 << 20;
        pub enum Choice { #[default] Auto, Named(u32) }
        impl Choice {
            pub const BYTES: ByteSize = ByteSize::mib(16);
            const ALL: [(Self, &str); 1] = [(Self::Auto, \"auto\")];
            fn time(self) -> Option<Duration> {
                let late = LATE;
                match self { Self::Named(_) => None, Self::Auto | Self::Other => Some(late) }
            }
            fn fmt(&self, f: &mut F) -> R {
                let name = Self::ALL.iter().find(|(choice, _)| choice == self);
                f.write_str(name.map_or(\"\", |(_, name)| name))
            }
        }
        #[cfg(test)]
        mod tests { const LATE: u8 = 1; }
    ";

    fn with<T>(ask: impl FnOnce(&Code<'_>) -> T) -> (T, Vec<String>) {
        let file = Source { name: "src/one/file.rs".to_owned(), text: TEXT.to_owned() };
        let (tree, faults) = (Tree { files: vec![file], binaries: Vec::new() }, Faults::default());
        let answer = ask(&Code::new(&tree, &faults));
        (answer, faults.sorted())
    }

    #[test]
    fn constants_defaults_and_short_functions_are_worked_out() {
        let (_, faults) = with(|code| {
            assert_eq!(code.constant("LATE").time(), Duration::from_millis(1500));
            assert_eq!(code.constant("one::file::STEP").time(), Duration::from_millis(10));
            assert_eq!(code.constant("PART").number().to_string(), "1048576");
            assert!(matches!(code.constant("Choice::BYTES").value, Value::Bytes(16_777_216)));
            assert_eq!(code.of("Choice", "Auto", "time").time(), Duration::from_millis(1500));
            assert!(code.of("Choice", "Named", "time").is_nothing());
            let auto = code.default_of("Choice").expect("a default");
            assert_eq!(code.name_of(&auto), "auto");
        });
        assert_eq!(faults, [""; 0]);
    }

    #[test]
    fn a_condition_on_test_is_told_from_its_negation() {
        for (text, expected) in [
            ("#[cfg(test)]", true),
            ("#[cfg(all(test, not(lowtide_loom)))]", true),
            ("#[cfg(not(test))]", false),
            ("#[cfg(any(not(test), unix))]", false),
            ("#[test]", true),
            ("#[cfg(feature = \"test\")]", false),
        ] {
            let item: ItemFn = syn::parse_str(&format!("{text} fn f() {{}}")).expect("Rust");
            assert_eq!(is_test(&item.attrs), expected, "{text}");
        }
    }

    #[test]
    fn what_is_not_found_or_of_another_kind_is_a_fault_with_its_place() {
        let (_, faults) = with(|code| {
            code.constant("GONE").number();
            code.constant("PART").time();
            code.constant("elsewhere::PART").number();
        });
        assert_eq!(faults.len(), 3, "{faults:#?}");
        assert!(faults.iter().any(|fault| fault.starts_with("src/one/file.rs:4: PART is")));
    }
}
